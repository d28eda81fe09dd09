"""slime's own router (--use-slime-router): small, passes requests on whole, and keeps the tokens of sessions.

`workers` chooses engines, `proxy` forwards requests and retries, `sessions` keeps tokens, `app` puts them together,
`process` is the entry point of its process, `client` reads what it keeps.
"""
