"""Judges: reward models that the trainer's process asks after a rollout.

    judge = build_judge("scalar", "models/reward_model")
    judge.scores(prompts, completions)                # one number per completion, without bounds
    judge.compare(prompts, firsts, seconds)           # +1: the first completion is better; 0: tie; -1: worse
    round_robin(judge, prompts, completions, groups)  # rewards in [0, 1] from comparisons within a group

A scalar judge is a model with a score head, for example a Bradley-Terry reward model. A generative judge is a
language model that compares two completions and writes a verdict; it runs in a second vLLM engine, or is a
function, for example a client of a server (`reward.judge_path=my_judge.py:ask`). train_rl.py trains such a
model on comparisons of kind `verdict`.
"""

import functools
import inspect
import itertools
import json
import math
import os
import string
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from batch import RolloutBatch
from data.chat import ChatTemplate, clock_of, load_tokenizer, without_special_tokens
from data.prompts import Prompt
from rollout import refuse_beside_graphs_of_experts, set_vllm_environment
from runtime.metrics import warn_once
from settings import JudgeMode
from verifiers.answer import final_answer, opened_thought, without_opened_thought
from verifiers.own import call_own, explain, load_function
from verifiers.verdict import SIGNS, last_verdict

TEMPLATE = """Task:\n{prompt}\n\nFirst answer:\n{first}\n\nSecond answer:\n{second}\n
Is each answer right, and where does it go wrong? Think step by step. Then say in one last line whether the
first answer is better than the second, as good or worse:\nVerdict: Better|Tie|Worse"""  # [ours]


# ------------------------------------------------------------------------------------------------------------
# Scalar judges
# ------------------------------------------------------------------------------------------------------------
class ScalarJudge:
    """Score prompt + completion with a Hugging Face sequence classifier that has one label.

    path: folder of the model and its tokenizer. batch_size: texts per forward pass. max_tokens: longer texts
    lose their beginning. margin: scores that differ by at most this much are a tie.
    """

    def __init__(
        self, path: str | os.PathLike, batch_size: int = 32, max_tokens: int = 4096, margin: float = 0.0
    ):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        refuse_kernels_of_the_hub(path)
        local = {"local_files_only": True, "trust_remote_code": False}
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path,
            dtype=torch.float32,  # [ours] bfloat16 rounds different scores to ties
            use_safetensors=True,
            output_loading_info=True,
            **local,
        )
        if model.config.num_labels != 1:
            raise ValueError(
                f"reward.judge_path {path}: the model has {model.config.num_labels} labels; a scalar judge "
                "needs a sequence classifier with 1 label"
            )
        if loading["missing_keys"]:  # transformers initialises a missing head with random numbers
            raise ValueError(
                f"reward.judge_path {path}: the checkpoint has no trained score head, as is the case for a "
                f"causal language model (missing weights: {', '.join(sorted(loading['missing_keys']))}); "
                "name the folder of a reward model"
            )
        left_out = [key for key in sorted(loading["unexpected_keys"]) if not key.startswith("lm_head.")]
        if left_out:
            raise ValueError(
                f"reward.judge_path {path}: {len(left_out)} tensors would be left out, for example "
                f"{left_out[0]}: check num_hidden_layers and attention_bias in config.json"
            )
        tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left", **local)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        text_config = model.config.get_text_config()
        text_config.pad_token_id = tokenizer.pad_token_id  # the model scores the last token before padding
        text_config.use_cache = False  # keys and values would fill gigabytes, although each text is read once
        # A prompt rendered by a chat template may begin with the token that the tokenizer adds to every text.
        added_ids = tokenizer("")["input_ids"][:1]
        self.added = "".join(tokenizer.convert_ids_to_tokens(added_ids))  # for example "<s>"; "" for none
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.margin = margin
        self.tokenize = functools.partial(
            tokenizer,
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=max_tokens,
            return_token_type_ids=False,
            return_tensors="pt",
        )
        self.model = model.eval().requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")

    def _batches(self, texts: list[str]) -> Iterator[tuple[list[str], dict]]:
        """Yield batches of distinct texts with the model's inputs, sorted by length to save padding."""
        sorted_texts = sorted(set(texts), key=lambda text: (len(text), text))
        for start in range(0, len(sorted_texts), self.batch_size):
            batch = sorted_texts[start : start + self.batch_size]
            inputs = self.tokenize(batch).to(self.model.device)
            if inputs["input_ids"].shape[1] >= self.max_tokens:
                warn_once(f"reward.judge: texts of more than {self.max_tokens} tokens lose their beginning")
            yield batch, inputs

    def scores(self, prompts: list[str], completions: list[str]) -> list[float]:
        """Return the score of each completion, which may be NaN or infinite; equal texts get equal scores.

        A special token that a completion spells out is broken by a space, because it would end the turn.
        """
        texts = [
            prompt.removeprefix(self.added) + without_special_tokens(completion, self.tokenize.func)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        score_of_text = {}
        for batch, inputs in self._batches(texts):
            score_of_text |= zip(batch, self.model(**inputs).logits[:, 0].tolist())
        return [score_of_text[text] for text in texts]

    def compare(self, prompts, firsts, seconds) -> list[int]:
        """Return the sign of each comparison, or NaN if one of the two scores is NaN.

        +1: the first completion scores higher by more than the margin; -1: lower; 0: tie.
        """
        scores = self.scores([*prompts, *prompts], [*firsts, *seconds])
        pairs = zip(scores[: len(prompts)], scores[len(prompts) :])
        return [self._sign(first, second) for first, second in pairs]

    def _sign(self, first: float, second: float) -> float:
        if math.isnan(first) or math.isnan(second):
            return math.nan
        return (first - second > self.margin) - (second - first > self.margin)


# ------------------------------------------------------------------------------------------------------------
# Generative judges
# ------------------------------------------------------------------------------------------------------------
def refuse_kernels_of_the_hub(path: str) -> None:
    """Raise ValueError if config.json asks transformers for compiled code, as org/repo of the hub."""

    def texts(value, name: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from texts(inner, key if "_implementation" in key else name)
        elif name and "/" in str(value):
            yield f"{name} {value}"

    config = json.loads(Path(path, "config.json").read_text())
    if text := next(texts(config), None):
        raise ValueError(
            f"reward.judge_path {path}: config.json would load code from the hub ({text[:80]}); remove it"
        )


class GenerativeJudge:
    """Let a language model reason about two completions and conclude with Better, Tie or Worse [secondary].

    generate: function from a list of questions to a list of answers. template: question with the placeholders
    {prompt}, {first} and {second}; None: TEMPLATE. num_answers: answers since the last judge_metrics();
    num_unreadable: answers among these without a verdict. An unreadable answer counts as a tie.
    """

    def __init__(self, generate: Callable[[list[str]], list[str]], template: str | None = None):
        self.generate = generate
        self.template = template or TEMPLATE
        self.num_answers = 0
        self.num_unreadable = 0

    def compare(self, prompts, firsts, seconds) -> list[int]:
        """Return +1 if the last verdict of an answer prefers the first completion, -1 the second, 0: tie."""
        questions = [
            self.template.format(prompt=prompt, first=first, second=second)
            for prompt, first, second in zip(prompts, firsts, seconds, strict=True)
        ]
        answers = self.generate(questions) if questions else []
        answers = checked_answers(answers, len(questions))
        verdicts = [last_verdict(final_answer(answer) or "") for answer in answers]
        self.num_answers += len(verdicts)
        self.num_unreadable += verdicts.count(None)
        return [SIGNS[verdict] if verdict else 0 for verdict in verdicts]


def checked_answers(answers, num_questions: int) -> list[str]:
    """Return the answers of a generative judge; ValueError unless they are a list, one text per question."""
    problem = ""
    if inspect.iscoroutine(answers):
        answers.close()  # prevents the warning "coroutine was never awaited"
        problem = "a coroutine; define the function with def, not with async def"
    elif not isinstance(answers, (list, tuple)):
        problem = f"{type(answers).__name__}, not a list of texts"
    elif len(answers) != num_questions:
        problem = f"{len(answers)} answers to {num_questions} questions, not one per question"
    elif others := [answer for answer in answers if not isinstance(answer, str)]:
        problem = f"an answer of type {type(others[0]).__name__}, not text"
    if problem:
        raise ValueError(f"reward.judge_path: the generative judge returned {problem}")
    return list(answers)


def load_greedy_chat(
    path: str, batch_size: int, max_tokens: int, template_args: dict, date: str | None = None
) -> Callable[[list[str]], list[str]]:
    """Start a second vLLM engine in this process; return a function from questions to greedy answers.

    Special tokens that a completion spells out are broken by a space, because they would end the question.
    Questions and answers get half of the context each; a longer question loses its beginning, and a warning
    says so. Equal questions are asked once: in a group of short completions most pairs occur several times.
    Tested with vLLM 0.30 on 1 and 2 CPU ranks beside the policy's engine: answers equal transformers'; a MoE
    judge fails beside a dense policy. template_args, date: of the chat template.
    """
    on_gpu = torch.cuda.is_available()
    set_vllm_environment(on_gpu)
    from vllm import LLM, SamplingParams

    refuse_beside_graphs_of_experts()
    llm = LLM(
        path,
        load_format="safetensors",
        dtype="auto" if on_gpu else "float32",
        max_num_seqs=batch_size,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=-1,
        gpu_memory_utilization=0.01,  # the cache has the fixed size above
        distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
        enforce_eager=not on_gpu,
        generation_config="vllm",
        use_tqdm_on_load=False,
    )
    half_context = llm.model_config.max_model_len // 2
    has_template = bool(llm.get_tokenizer().chat_template)
    options = {
        "sampling_params": SamplingParams(temperature=0.0, max_tokens=min(max_tokens, half_context)),
        "tokenization_kwargs": {
            "truncate_prompt_tokens": half_context,
            "truncation_side": "left",
            "add_special_tokens": not has_template,  # BOS, as in the training of a judge on plain text
        },
        "chat_template": None if has_template else "{{ messages[0].content }}",
        "chat_template_kwargs": template_args | clock_of(llm.get_tokenizer(), date),
        "use_tqdm": False,
    }

    def generate(questions: list[str]) -> list[str]:
        distinct = list(dict.fromkeys(questions))
        plain = [without_special_tokens(question, llm.get_tokenizer()) for question in distinct]
        chats = [[{"role": "user", "content": question}] for question in plain]
        outputs = llm.chat(chats, **options)
        if any(len(output.prompt_token_ids) >= half_context for output in outputs):
            warn_once(
                f"reward.judge_path {path}: a question reaches {half_context} tokens, half of the judge's "
                "context; longer questions lose their beginning, so use a judge with a longer context or a "
                "smaller rollout.max_new_tokens"
            )
        ends = [llm.get_tokenizer().decode(output.prompt_token_ids[-16:]) for output in outputs]
        answers = [opened_thought(end) + output.outputs[0].text for end, output in zip(ends, outputs)]
        answer_of = dict(zip(distinct, answers))
        return [answer_of[question] for question in questions]

    return generate


# ------------------------------------------------------------------------------------------------------------
# From settings to a judge, from comparisons to rewards
# ------------------------------------------------------------------------------------------------------------
def has_places(template: str) -> bool:
    """Tell whether a question to a judge has the places {prompt}, {first} and {second}, and no other."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:  # a single brace
        return False
    return names == {"prompt", "first", "second"}


def refuse_mute_judge(kind: str, path: str | None, template_args: dict | None = None) -> None:
    """Raise ValueError for the folder of a generative judge that cannot write Better, Tie and Worse.

    The vocabulary of a small model may lack letters. The chat template has to read template_args. The check
    reads the tokenizer and the configuration, so that the error comes before any engine starts.
    """
    if kind != "generative" or not os.path.isfile(config_file := os.path.join(path, "config.json")):
        return  # build_judge() explains paths that are no folder
    tokenizer = load_tokenizer(path, "reward.judge_path")
    if template_args:
        template = ChatTemplate(tokenizer, args=template_args, setting="reward.judge_chat_template_args")
        template.check(f"reward.judge_path {path}")
    with open(config_file) as file:
        num_rows = json.load(file).get("vocab_size", len(tokenizer))
    missing = []
    for verdict in SIGNS:
        ids = tokenizer.encode(verdict, add_special_tokens=False)
        if max(ids, default=num_rows) >= num_rows or last_verdict(tokenizer.decode(ids)) != verdict:
            missing.append(verdict)
    if missing:
        raise ValueError(
            f"reward.judge_path {path}: the judge cannot write {', '.join(missing)}, because its vocabulary "
            "has no tokens for the word; name a judge that was trained on verdicts (docs/judges.md)"
        )


def judge_of_function(path: str, template: str | None) -> GenerativeJudge:
    """Return the judge module:function or path/file.py:function; ValueError explains a failed import."""
    try:
        function = load_function(path).call
    except (Exception, SystemExit) as error:  # an import can raise anything
        raise ValueError(f"reward.judge_path: cannot import the judge {path!r}: {explain(error)}") from error

    def generate(questions: list[str]) -> list[str]:
        try:
            return call_own(function, questions)
        except BaseException as error:  # a function that calls sys.exit() must not end the run in silence
            raise RuntimeError(f"reward.judge_path {path}: the function failed: {explain(error)}") from error

    return GenerativeJudge(generate, template)


def refuse_failing_judge(kind: str, path: str | None, template: str | None = None) -> None:
    """Ask a judge that is a function one question, before any engine starts; ValueError if it fails.

    The question is short. A function that calls a paid service costs one question per rank and launch.
    """
    if kind != "generative" or ":" not in path or os.path.isfile(os.path.join(path, "config.json")):
        return  # build_judge() explains paths that are neither a function nor a folder
    judge = judge_of_function(path, template)
    question = judge.template.format(prompt="What is 1 + 1?", first="2", second="3")
    try:
        checked_answers(judge.generate([question]), 1)
    except RuntimeError as error:
        raise ValueError(f"{error} at the first question") from error


def build_judge(
    kind: str,
    path: str | None,
    batch_size: int = 32,
    max_tokens: int = 4096,
    margin: float = 0.0,
    template: str | None = None,
    template_args: dict | None = None,
    date: str | None = None,
) -> ScalarJudge | GenerativeJudge | None:
    """Load a judge; ValueError explains why a path cannot be loaded.

    kind: "scalar", "generative", or "none", which returns None. path: folder of a Hugging Face model, or for
    a generative judge also module:function or path/file.py:function. max_tokens: limit of a text (scalar) or
    an answer (generative). margin: see ScalarJudge. template: see GenerativeJudge. template_args: arguments
    of the chat template in the folder. date: see load_greedy_chat().
    """
    if kind == "none":
        return None
    refuse_mute_judge(kind, path, template_args)
    if os.path.isfile(os.path.join(path, "config.json")):
        if kind == "scalar":
            return ScalarJudge(path, batch_size, max_tokens, margin)
        generate = load_greedy_chat(path, batch_size, max_tokens, template_args or {}, date)
        return GenerativeJudge(generate, template)
    if kind == "scalar" or ":" not in path:
        hint = "" if kind == "scalar" else " or a function, for example my_judge.py:ask"
        raise ValueError(
            f"reward.judge_path {path!r} is no folder with the config.json of a Hugging Face model; a "
            f"{kind} judge needs such a folder{hint}"
        )
    return judge_of_function(path, template)


def judge_rewards(judge, batch: RolloutBatch, texts: list[str], mode: JudgeMode) -> list[float]:
    """Return the judge's reward of each completion [ours: the mapping from verdicts to rewards].

    score               sigmoid of a scalar model's score
    pairwise_reference  better / tie / worse than the reference answer as 1 / 0 / -1
    round_robin         mean over the group's other completions of better 1, tie 1/2, worse 0
    """
    prompts = prompts_for(judge, batch.prompts)
    match mode:
        case "score":
            return torch.tensor(judge.scores(prompts, texts), dtype=torch.float64).sigmoid().tolist()
        case "pairwise_reference":
            return pairwise_reference(judge, prompts, texts, [prompt.answer for prompt in batch.prompts])
        case "round_robin":
            return round_robin(judge, prompts, texts, batch.group_index.tolist())


def judge_metrics(judge) -> dict[str, tuple[float, float]]:
    """Return judge/unreadable_frac since the last call as (sum, count); {} without a generative judge."""
    if not isinstance(judge, GenerativeJudge):
        return {}
    counts = judge.num_unreadable, judge.num_answers
    judge.num_unreadable = judge.num_answers = 0
    return {"judge/unreadable_frac": counts}


def pairwise_reference(judge, prompts, completions, references) -> list[float]:
    """Return 1, 0 or -1 if a completion is better than, as good as or worse than the reference [ours]."""
    return [float(sign) for sign in judge.compare(prompts, completions, references)]


def prompts_for(judge, prompts: list[Prompt]) -> list[str]:
    """Return the prompts as the judge reads them.

    A scalar judge scores the text that the policy continued. A generative judge has a chat template of its
    own, so the prompt in its question is the conversation without special tokens.
    """
    if isinstance(judge, ScalarJudge):  # the completion begins with the prefix
        return [without_opened_thought(prompt.text.removesuffix(prompt.prefix)) for prompt in prompts]
    return [prompt.conversation for prompt in prompts]


def round_robin(judge, prompts, completions, group_index: list[int]) -> list[float]:
    """Return the mean points of each completion against the other completions of its group [ours].

    better 1, tie 0.5, worse 0; a group of one gets 0.5. Example: in a group of three, a completion that is
    better than the second and ties with the third gets 0.75. The judge compares each pair once. Every
    completion comes first in half of its comparisons, up to one, because a judge may prefer a position; so
    equal texts tie without a question.
    group_index: group of each completion, in any order.
    """
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, (group, *_) in enumerate(zip(group_index, prompts, completions, strict=True)):
        rows_of[group].append(row)
    pairs = [
        (first, second) if (i + j) % 2 else (second, first)
        for group in sorted(rows_of)
        for (i, first), (j, second) in itertools.combinations(enumerate(rows_of[group]), 2)
    ]
    different = [(first, second) for first, second in pairs if completions[first] != completions[second]]
    signs = judge.compare(
        [prompts[first] for first, _ in different],
        [completions[first] for first, _ in different],
        [completions[second] for _, second in different],
    )
    sign_of = dict(zip(different, signs, strict=True))
    points: list[list[float]] = [[] for _ in prompts]
    for first, second in pairs:
        sign = sign_of.get((first, second), 0)
        points[first].append((1 + sign) / 2)
        points[second].append((1 - sign) / 2)
    return [sum(row) / len(row) if row else 0.5 for row in points]
