"""Find the final answer of a completion: the text after its thought.

    final_answer("<think>It is 5, no, 4.</think>It is 4.")        # "It is 4."
    final_answer("It is 4.")                                      # "It is 4.": there is no thought
    final_answer("<think>It is 5, no")                            # None: cut inside of the thought
    final_answer("It is 5, no", opened_thought("...<think>\\n"))  # None: the prompt opened the thought
    stated_answer("So it is 4.\\nAnswer: 4")                       # "4"

All built-in kinds judge this text (reward.py), and calls of tools are read from it (episodes.py).
"""

import re

# <think> (DeepSeek-R1, Qwen 3, GLM), <thinking>, <thought>, <reasoning>, <seed:think>, [THINK] (Magistral),
# ◁think▷ (Kimi) and the channels of gpt-oss.
_TAG = re.compile(
    r"<(?P<angle>/?)(?P<name>(?:\w{1,20}:)?(?:think|thinking|thought|reasoning))>"
    r"|\[(?P<square>/?)THINK\]|\u25c1(?P<kimi>/?)think\u25b7"
    r"|<\|channel\|>(?:analysis|(?P<final>final))<\|message\|>",
    re.IGNORECASE,
)


def _sort_of(tag: re.Match) -> tuple[str, bool]:
    """Return the sort of a tag, for example "think", and whether the tag closes a thought."""
    sort = (tag["name"] or tag[0][0] + tag[0][-1]).lower()
    return sort, any(tag[group] for group in ("angle", "square", "kimi", "final"))


def is_tag(token: str) -> bool:
    """Tell whether a token is a tag that verifiers read. A special token of that form is lost in decoding."""
    return bool(_TAG.fullmatch(token)) or token in ("<answer>", "</answer>", "<|channel|>")


def opened_thought(prompt: str) -> str:
    """Return the tag at the end of a prompt that opens the thought of the completion; "" if there is none."""
    tags = list(_TAG.finditer(prompt, max(0, len(prompt.rstrip()) - 40)))
    if not tags or prompt[tags[-1].end() :].strip() or _sort_of(tags[-1])[1]:
        return ""
    return tags[-1][0]


def without_opened_thought(prompt: str) -> str:
    """Return a prompt without the tag that opens the completion's thought, for readers of answers alone."""
    return prompt[: prompt.rindex(tag)] if (tag := opened_thought(prompt)) else prompt


def final_answer(completion: str, opening: str = "") -> str | None:
    """Return the text after the last thought of a completion, or None if the completion ends in a thought.

    opening: the tag of opened_thought(), if the prompt opened the thought. Without that tag, a closing tag
    ends a thought that has no opening. A thought ends at the first closing tag of its own sort.
    """
    thought = _sort_of(_TAG.match(opening))[0] if opening else None
    start = 0
    for tag in _TAG.finditer(completion):
        sort, is_closing = _sort_of(tag)
        if not is_closing:
            thought = thought or sort
        elif thought == sort or (thought is None and not start):
            thought = None
            start = tag.end()
    return None if thought else completion[start:]


_STATED = re.compile(r"answer\W{0,3}(?:is)?\s*:[*_ \t]*", re.IGNORECASE)


def stated_answer(text: str) -> str | None:
    """Return the answer that a text marks as such: the words of the answer alone, without a thought.

    It is the text between the last <answer> tags, else the last box, else the line after the last "Answer:"
    (all following lines, if that line is empty), else the whole text if it is one line, else None.
    """
    opening = text.rfind("<answer>", 0, max(0, text.rfind("</answer>")))
    if opening >= 0:
        return text[opening + len("<answer>") :].partition("</answer>")[0].strip()
    if "\\boxed" in text or "\\fbox" in text:
        from verifiers.math import boxes

        return all_boxes[-1][2] if (all_boxes := boxes(text)) else None
    *_, stated = _STATED.split(text)
    if stated != text:
        first, _, rest = stated.strip(" ").partition("\n")
        return first.strip() or rest.strip()
    return text.strip() if "\n" not in text.strip() else None
