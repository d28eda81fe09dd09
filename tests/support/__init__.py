"""What the tests share: real servers, process pools and command lines. The fixtures are in `tests/conftest.py`."""
