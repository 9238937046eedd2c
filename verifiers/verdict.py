"""Verdicts of a judge that compares two completions: read them from text, and reward a judge for a right one.

    last_verdict("The first forgets a carry.\\nVerdict: Worse")     # "Worse"
    verify("The first forgets a carry.\\nVerdict: Worse", "Worse")  # (1.0, "ok", "")

A judge reasons before it concludes, so the last verdict of a text counts. With this verifier train_rl.py
trains a judge as a policy: the prompt is a comparison and the answer is the label (docs/judges.md).
"""

import re

SIGNS = {"Better": 1, "Tie": 0, "Worse": -1}  # of the first completion, compared with the second [secondary]
# The words of a repeated instruction "Better|Tie|Worse" are not verdicts.
_VERDICT = re.compile(r"(?<!\|)\b(Better|Tie|Worse)\b(?!\|)")


def last_verdict(text: str) -> str | None:
    """Return the last of the words Better, Tie and Worse in a text, None if there is none."""
    words = _VERDICT.findall(text)
    return words[-1] if words else None


def verify(completion: str, answer: str) -> tuple[float, str, str]:
    """Return 1 if the last verdict of the completion is the label, else 0; the status; and a detail."""
    label = answer.strip()
    if label not in SIGNS:
        return 0.0, "error", f"the label must be Better, Tie or Worse, not {answer[:99]!r}"
    verdict = last_verdict(completion)
    if verdict is None:
        return 0.0, "no_answer", ""
    return (1.0, "ok", "") if verdict == label else (0.0, "wrong", "")
