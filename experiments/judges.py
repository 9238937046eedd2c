"""Judges: reward models, asked in the trainer's process after a rollout, when the cheap rules have spoken.

judge = build_judge("scalar", "path/of/a/reward/model")
rewards = round_robin(judge, prompts, completions, group_index)
"""

import functools
import itertools
import operator
import os
import pkgutil
import re
from collections.abc import Callable

TEMPLATE = """Task:\n{prompt}\n\nFirst answer:\n{first}\n\nSecond answer:\n{second}\n
Is each answer right, and where does it go wrong? Think step by step. Then say in one last line whether the
first answer is better than the second, as good or worse:\nVerdict: Better|Tie|Worse"""  # [ours]


class ScalarJudge:
    """A reward model with one label, such as a Bradley-Terry model, of prompt + completion as they are.

    path: Hugging Face folder. batch_size: texts per forward. max_tokens: a longer text loses its beginning.
    """

    def __init__(self, path: str | os.PathLike, batch_size: int = 32, max_tokens: int = 4096):
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        model, loading = AutoModelForSequenceClassification.from_pretrained(  # [ours]: bfloat16 makes ties
            path, dtype=torch.float32, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
        if model.config.num_labels != 1 or loading["missing_keys"]:  # a causal LM's head would be random
            raise ValueError(f"judge {path} has {model.config.num_labels} labels, not 1, or no trained head")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, truncation_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # it marks the end of a text
        self.batch_size, self.tokenize = (
            batch_size,
            functools.partial(
                tokenizer,
                padding=True,
                padding_side="right",
                truncation=True,
                max_length=max_tokens,
                return_token_type_ids=False,
                return_tensors="pt",
            ),
        )
        self.model = model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")

    def scores(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Raw scores; NaN and inf are handed on. Equal texts are read once and get equal scores."""
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        order, scores = sorted(set(texts), key=lambda text: (len(text), text)), {}  # little padding
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            logits = self.model(**self.tokenize(batch).to(self.model.device)).logits  # [B, 1]
            scores |= zip(batch, logits[:, 0].tolist())
        return [scores[text] for text in texts]

    def compare(self, prompts, firsts, seconds, margin: float = 0.0) -> list[int]:
        """+1 where the first completion scores more than margin above the second, -1 below it, else 0."""
        scores = self.scores([*prompts, *prompts], [*firsts, *seconds])
        return [(a - b > margin) - (b - a > margin) for a, b in zip(scores, scores[len(prompts) :])]


class GenerativeJudge:
    """A language model: a chain of thought on two completions, then Better, Tie or Worse [secondary].

    generate: prompts -> answers, in order. num_unreadable: answers without a verdict so far; they are ties.
    """

    def __init__(self, generate: Callable[[list[str]], list[str]], template: str = TEMPLATE):
        self.generate, self.template, self.num_unreadable = generate, template, 0

    def compare(self, prompts, firsts, seconds) -> list[int]:
        """+1 where the answer's last verdict finds the first completion better, -1 where worse, else 0."""
        questions = [
            self.template.format(prompt=prompt, first=first, second=second)
            for prompt, first, second in zip(prompts, firsts, seconds, strict=True)
        ]
        answers = self.generate(questions) if questions else []
        if len(answers) != len(questions):
            raise ValueError(f"the generative judge gave {len(answers)} answers to {len(questions)} prompts")
        found = [re.findall(r"(?<!\|)\b(Better|Tie|Worse)\b(?!\|)", answer) for answer in answers]  # no echo
        self.num_unreadable += found.count([])
        return [{"Better": 1, "Worse": -1}.get(words[-1], 0) if words else 0 for words in found]


def pairwise_reference(judge, prompts, completions, references) -> list[float]:
    """r_i = +1, 0 or -1: completion i is better than, as good as or worse than reference i [ours]."""
    return [float(sign) for sign in judge.compare(prompts, completions, references)]


def round_robin(judge, prompts, completions, group_index: list[int]) -> list[float]:
    """r_i = mean over j != i in i's group of [better 1, tie 0.5, worse 0]; 0.5 for a group of one [ours].

    group_index: group of each completion, in any order. A pair i < j is asked once, i first, for both.
    """
    items = sorted(zip(group_index, range(len(prompts)), prompts, completions, strict=True))
    groups = [list(group) for _, group in itertools.groupby(items, key=operator.itemgetter(0))]
    pairs = [pair for group in groups for pair in itertools.combinations(group, 2)]
    signs = judge.compare([a[2] for a, _ in pairs], [a[3] for a, _ in pairs], [b[3] for _, b in pairs])
    points = [[] for _ in items]
    for (a, b), sign in zip(pairs, signs):
        points[a[1]].append((1 + sign) / 2)
        points[b[1]].append((1 - sign) / 2)
    return [sum(won) / len(won) if won else 0.5 for won in points]


def build_judge(kind: str, path: str | None, batch_size: int = 32, max_tokens: int = 4096):
    """The judge in a folder, or the generative one "module:function"; ValueError says why it cannot be.

    kind: "scalar", "generative", or "none", which gives None.
    """
    if kind == "none":
        return None
    if os.path.isfile(os.path.join(path, "config.json")):
        return {"scalar": ScalarJudge, "generative": vllm_judge}[kind](path, batch_size, max_tokens)
    if kind == "scalar" or ":" not in path:
        raise ValueError(f"judge {path!r}: no folder with the config.json of a Hugging Face model")
    try:
        return GenerativeJudge(pkgutil.resolve_name(path))
    except Exception as error:  # whatever its import raises
        raise ValueError(f"cannot import the judge {path!r}: {type(error).__name__}: {error}") from error


def vllm_judge(path: str, batch_size: int, max_tokens: int) -> GenerativeJudge:
    """Greedy answers of a second vLLM engine in this process; of a long question only the end is read.

    Tried after the policy's, on 1 and 2 CPU ranks, vLLM 0.30: exact, but an MoE after a dense policy fails.
    """
    import rollout

    rollout.set_vllm_environment(on_gpu := rollout.torch.cuda.is_available())
    from vllm import LLM, SamplingParams

    llm = LLM(
        path,
        load_format="safetensors",
        dtype="auto" if on_gpu else "float32",
        max_num_seqs=batch_size,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=-1,
        gpu_memory_utilization=0.01,  # what fits
        distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
        enforce_eager=not on_gpu,
        generation_config="vllm",
        use_tqdm_on_load=False,
    )
    half = llm.model_config.max_model_len // 2
    options = {
        "sampling_params": SamplingParams(temperature=0.0, max_tokens=min(max_tokens, half)),
        "tokenization_kwargs": {"truncate_prompt_tokens": half, "truncation_side": "left"},
        "chat_template": None if llm.get_tokenizer().chat_template else "{{ messages[0].content }}",
    }
    return GenerativeJudge(
        lambda questions: [
            output.outputs[0].text
            for output in llm.chat(
                [[{"role": "user", "content": question}] for question in questions], use_tqdm=False, **options
            )
        ]
    )
