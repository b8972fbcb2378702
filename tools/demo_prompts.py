"""Prompts of the demo's kind for calibration and for measuring it: `python tools/demo_prompts.py calibration > FILE`.

The two sets share their sentences but no subject, so that what is measured was not calibrated on.
"""

from __future__ import annotations

import sys

SENTENCES = (
    "What is {}?",
    "Tell me about {}.",
    "Write a short story about {}.",
    "Explain {} in simple words.",
    "Name three facts about {}.",
    "Why do people care about {}?",
    "Write a short poem about {}.",
    "How would you describe {} to a child?",
    "Write a short letter to a friend about {}.",
    "Write a small Python function that has to do with {}.",
)
SUBJECTS = {
    "calibration": (
        "the moon", "a lighthouse", "bread", "winter", "a train", "the ocean", "a garden", "music", "a bicycle",
        "trees", "a clock", "honesty", "the human heart", "a library", "chess", "volcanoes", "a letter", "coffee",
    ),
    "held-out": (
        "a fox", "the sun", "cheese", "autumn", "a bridge", "mountains", "a kitchen", "painting", "a computer",
        "birds", "patience", "a map",
    ),
}  # fmt: skip


def prompts(name: str) -> list[str]:
    """The set `calibration` (180) or `held-out` (120)."""
    return [sentence.format(subject) for subject in SUBJECTS[name] for sentence in SENTENCES]


if __name__ == "__main__":
    print("\n".join(prompts(sys.argv[1])))
