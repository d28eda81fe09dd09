"""Normal forms of maths answers: one as string (MATH), one that sympy can parse."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = (
    "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter|pound|ounce|gram"
)
_UNIT = re.compile(rf"(?<![a-zA-Z])(?:{_UNITS})(?:e?s)?\s*(?:\^\s*\{{?\d+\}}?)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SCALES = {"million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(\d{{1,20}}(?:\.\d{{1,20}})?)\s*({'|'.join(_SCALES)})")


def mathd_normalize_answer(answer: str | None) -> str | None:
    """The string form in which the MATH data set compares answers (Hendrycks et al., arXiv:2103.03874)."""
    if answer is None:
        return None
    text = answer.strip()
    wrapped = re.fullmatch(r"\\text\{(.+?)\}", text)
    return _mathd_string(wrapped[1].strip() if wrapped else text)


def _mathd_string(text: str) -> str:
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = text.replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "").replace("$", "")
    text = text.split("\\text{ ")[0]  # units stand behind the number
    text = text.replace("\\%", "").replace("%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    left, equals, right = text.partition("=")
    text = right if equals and "=" not in right and len(left.strip()) <= 2 else text  # "x = 5" is "5"
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = text.replace(" ", "")
    text = _brace_fractions(text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def _brace_fractions(text: str) -> str:
    """`\\frac12` and `\\frac1{2}` → `\\frac{1}{2}`."""
    text = re.sub(r"\\frac([^{\s])([^{\s])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{\s])\{", r"\\frac{\1}{", text)
    return re.sub(r"(\\frac\{[^{}]*\})([^{\s])", r"\1{\2}", text)


def sympy_normalize(expr: str | None) -> str | None:
    """Plain arithmetic notation without text, units, currency and digit grouping."""
    if expr is None:
        return None
    wrapped = re.fullmatch(r"\\text\{(.+?)\}", expr.strip())
    text = wrapped[1] if wrapped else expr
    text = text.replace("\\%", "%").replace("\\$", "$").replace("$", "").replace("%", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    text = _SCALED.sub(lambda match: f"{Decimal(match[1]) * _SCALES[match[2]]:f}", text)
    text = _UNIT.sub("", text)
    text = re.sub(r"\^\s*\{?\\circ\}?", "", text)
    while text.startswith("{") and text.endswith("}") and text.count("{") == 1:
        text = text[1:-1]
    text = re.sub(r",\s*\\?!", ",", text.replace("\\!", ""))
    if re.fullmatch(r"\s*-?\d{1,300}\.0*\s*", text):
        text = text.split(".")[0]
    if "\\" in text:
        text = latex_to_text(text)
    text = re.sub(r"-\s+", "-", text)
    text = re.sub(r"(?<=\d)\s+(?=\(?\d+\)?/\(?\d)", "+", text)  # mixed number: 7 3/4 → 7+3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    text = _THOUSANDS.sub("", text)
    return text


def latex_to_text(latex: str) -> str:
    """Fractions, roots, constants and operators of LaTeX in plain notation.

    >>> latex_to_text(r"2\\frac{1}{\\sqrt{3}}")
    '2 (1)/(sqrt(3))'
    """
    text = _brace_fractions(re.sub(r"\\[tdc]frac", r"\\frac", latex))
    text = text.replace("\\left", "").replace("\\right", "")
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    for _ in range(text.count("\\frac") + text.count("\\sqrt")):  # innermost first
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", _plain_fraction, text)
        text = re.sub(r"\\sqrt\s*\[([^\[\]{}]*)\]\s*\{([^{}]*)\}", r"(\2)^(1/(\1))", text)
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|operatorname)\s*\{([^{}]*)\}", r"\1", text)
    replacements = {"\\cdot": "*", "\\times": "*", "\\div": "/", "\\infty": "inf", "\\cup": "U", "\\pi": "pi"}
    for command, plain in replacements.items():
        text = text.replace(command, plain)
    for symbol, plain in {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*", "−": "-"}.items():
        text = text.replace(symbol, plain)
    return re.sub(r"\\([a-zA-Z]+)", r"\1", re.sub(r"\\[,;: ]", " ", text)).strip()


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = match[1].strip(), match[2].strip()
    simple = re.fullmatch(r"\d+", top) and re.fullmatch(r"\d+", bottom)
    return f" {top}/{bottom}" if simple else f" ({top})/({bottom})"
