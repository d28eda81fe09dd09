"""Token F1 between an answer and a reference, as SQuAD and HotpotQA measure it."""

from __future__ import annotations

import re
import string
from collections import Counter

CLOSED_ANSWERS = ("yes", "no", "noanswer")


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation and articles, single spaces."""
    text = "".join(char for char in s.lower() if char not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over the words of both; yes, no and noanswer count only when equal."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, expected = normalize_answer(str(prediction)), normalize_answer(str(ground_truth))
    if predicted != expected and (predicted in CLOSED_ANSWERS or expected in CLOSED_ANSWERS):
        return 0.0, 0.0, 0.0
    predicted_words, expected_words = predicted.split(), expected.split()
    common = sum((Counter(predicted_words) & Counter(expected_words)).values())
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted_words), common / len(expected_words)
    return 2 * precision * recall / (precision + recall), precision, recall
