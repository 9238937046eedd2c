"""Tasks of reasoning-gym: load the package, and score an answer by the verifier of the task that a row names.

    verify("<answer>4</answer>", '{"task": "gcd", "answer": "4", "metadata": {}}')     # (1.0, "ok", "")

The answer of a row is JSON: the task's name in the package's registry, the numbers of its configuration that
differ from the default ("config"), and the entry that the verifier reads ("answer", "metadata"). Nothing in
it is code. `data/reasoning_gym.py` writes such rows.

Some verifiers of the package evaluate the answer of the policy, or of the row, as Python. load() puts readers
of literals and formulas in their place, see LITERALS and FORMULAS.
"""

import ast
import builtins
import contextlib
import difflib
import functools
import importlib
import importlib.util
import json
import operator
import re
import sys
import types
from dataclasses import fields

from verifiers.answer import stated_answer
from verifiers.expressions import TEXT_COMMAND

# Required at import by reasoning-gym's requirements, for one task or for nothing: pycosat is C source (zebra
# puzzles), drawsvg draws boards, zss imports `range` from six.
STAND_INS = ("pycosat", "drawsvg", "six", "six.moves")
UNUSABLE = {
    "composite": "it mixes other tasks: name those",
    "zebra_puzzles": "it needs the package pycosat, which is C source: install a compiler and pycosat==0.6.6",
    "boxnet": "it knows no right answer, so that nothing shows that a row can be solved",
    "rush_hour": "it knows no right answer, so that nothing shows that a row can be solved",
    "coin_flip": "its verifier accepts 0 as the beginning of every probability",
    "game_of_life_halting": "its verifier accepts every text",
    "propositional_logic": "its verifier accepts a copy of a premise",
    "puzzle24": "its verifier accepts any four numbers, for example 4*6*1*1 in every row",
}
UNIQUE = ("game_of_life", "letter_jumble", "spell_backward", "word_sorting")  # the package takes longer ones
ONE_NUMBER = r"(?!.*\b(?:minus|negative|not)\b)[^\d\u2212\u2013-]*[\d,.]+\D*"
EXAMPLES = ("example_answer", "example_correct_answer", "possible_answer")  # in metadata, if answer is None
# Modules of the package with eval() of an answer, of text in a row, or of a formula by SymPy, which also runs
# eval(). The tasks that evaluate only their own constants while they make a row are not listed.
LITERALS = (
    "algorithmic.binary_matrix", "algorithmic.number_sorting", "algorithmic.spiral_matrix",
    "algorithmic.string_insertion", "games.n_queens",
)  # fmt: skip
FORMULAS = {  # module: the name that evaluates
    "arithmetic.bitwise_arithmetic": "eval", "games.countdown": "parse_expr", "games.puzzle24": "parse_expr",
    "algebra.simple_integration": "sympy", "algebra.intermediate_integration": "sympy",
    "algebra.polynomial_multiplication": "sp",
}  # fmt: skip
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
MAX_POWER = 999  # larger exponents would take all memory
MARKUP = "*_`$ \t\n"
FUNCTIONS = (
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs erf"
).split()


class StandIn(types.ModuleType):
    """An absent module, whose classes and functions can be named but not called."""

    __path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args, **kwargs):
            raise ImportError(f"the package {self.__name__} is not installed")

        return getattr(builtins, name, type(name, (), {"__new__": refuse}))


@functools.cache
def load():
    """Import reasoning-gym without its optional requirements, and replace what evaluates text."""
    for name in STAND_INS:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = StandIn(name)
    try:
        package = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError(f"reasoning-gym cannot be imported ({error}): run `make install`") from error
    for name in LITERALS:
        importlib.import_module(f"reasoning_gym.{name}").eval = ast.literal_eval  # type: ignore[attr-defined]
    for name, evaluator in FORMULAS.items():
        module = importlib.import_module(f"reasoning_gym.{name}")
        is_library = evaluator in ("sympy", "sp")
        library = types.SimpleNamespace(**vars(importlib.import_module("sympy")) | {"parse_expr": formula})
        setattr(module, evaluator, library if is_library else formula)
    return package


def formula(text: str, local_dict: dict | None = None):
    """Read a formula as a SymPy expression; ValueError for anything else. sympy.parse_expr() would run it."""
    import sympy

    names = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, **(local_dict or {})}

    def read(node):
        match node:
            case ast.Constant(value=int(number)):
                return sympy.Integer(number)
            case ast.Constant(value=float(number)):
                return sympy.Float(str(number))
            case ast.BinOp() if type(node.op) in OPERATORS:
                right = read(node.right)
                if isinstance(node.op, (ast.Pow, ast.LShift)) and right.is_number and abs(right) > MAX_POWER:
                    raise ValueError(f"too large: {text[:80]!r}")
                return OPERATORS[type(node.op)](read(node.left), right)
            case ast.UnaryOp() if type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](read(node.operand))
            case ast.Name(id=name):
                return names.get(name) or sympy.Symbol(name)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in FUNCTIONS:
                return getattr(sympy, name)(*map(read, node.args))
        raise ValueError(f"no formula: {text[:80]!r}")

    return read(ast.parse(text.strip(), mode="eval").body)


def refusal(task: str) -> str | None:
    """Return why a task cannot be used; None if it can."""
    names = load().factory.DATASETS
    if task not in names:
        nearest = difflib.get_close_matches(str(task), names, n=3, cutoff=0.0)
        return f"reasoning-gym has no task {task!r}: did you mean {', '.join(nearest)}?"
    if task == "zebra_puzzles" and not isinstance(sys.modules.get("pycosat"), StandIn):
        return None
    return f"the task {task} cannot be used: {UNUSABLE[task]}" if task in UNUSABLE else None


def numbers_of(config: dict) -> dict:
    """Return the numbers and flags of a configuration. Texts stay out: some name files."""
    return {name: value for name, value in config.items() if isinstance(value, (bool, int, float))}


@functools.lru_cache(maxsize=128)
def generator(task: str, config: str = "{}", seed: int = 0):
    """Return the generator and verifier of a task; config: its settings as JSON. ValueError explains."""
    if reason := refusal(task):
        raise ValueError(reason)
    make, settings = load().factory.DATASETS[task]
    values = json.loads(config)
    if unknown := set(values) - {field.name for field in fields(settings)}:
        raise ValueError(f"the task {task} has no setting {min(unknown)}")
    return make(settings(**values | {"seed": seed}))


def read_row(answer: str) -> dict:
    """Return the JSON of a row's answer; ValueError if it is none."""
    try:
        row = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"the answer of a row of reasoning_gym is not JSON: {error}") from None
    types_of = {"task": str, "metadata": dict}
    if not isinstance(row, dict) or not all(isinstance(row.get(n), t) for n, t in types_of.items()):
        raise ValueError("the answer of a row of reasoning_gym needs a task (text) and metadata (an object)")
    if not isinstance(row.get("config", {}), dict):
        raise ValueError("the config of a row of reasoning_gym must be an object")
    return row


def reference_of(answer: str) -> str:
    """Return the reference answer of a row as text, "" if there is none."""
    row = read_row(answer)
    metadata = row["metadata"]
    value = row.get("answer")
    if value is None:
        value = next((metadata[name] for name in EXAMPLES if metadata.get(name) is not None), "")
    return value if isinstance(value, str) else json.dumps(value)


def verifier_of(row: dict):
    """Return the verifier of a row's task; ValueError for a task or setting that does not exist."""
    return generator(row["task"], json.dumps(numbers_of(row.get("config", {})), sort_keys=True))


def score(row: dict, text: str) -> float:
    """Return the score in [0, 1] that the verifier of the row's task gives to an answer."""
    if re.search(r"\bnan\b", text, re.IGNORECASE) and "nan" not in str(row.get("answer")).lower():
        return 0.0  # no comparison with NaN fails, so that some verifiers give it 1
    metadata = dict(row["metadata"])
    if row["task"] in ("arc_agi", "rearc"):  # compared with a tuple, which JSON lacks
        metadata["output"] = tuple(map(tuple, metadata["output"]))
    value = float(verifier_of(row).score_answer(text, {"answer": row.get("answer"), "metadata": metadata}))
    if not value >= 1 - 1e-9:
        return value if value > 0 else 0.0
    if row["task"] == "gsm_symbolic":  # which reads -4 as 4, and the first of several numbers
        return float(re.fullmatch(ONE_NUMBER, text) is not None)
    letters, expected = ("".join(each.split()).casefold() for each in (text, str(row.get("answer"))))
    return float(row["task"] not in UNIQUE or letters == expected)


def without_markup(text: str) -> str:
    r"""Return an answer without emphasis, code marks, \text, delimiters of formulas or full stops around."""
    text = text.lstrip(MARKUP).rstrip(MARKUP + ".")
    if text[:2] in (r"\(", r"\[") and text[-2:] in (r"\)", r"\]"):
        text = text[2:-2].strip()
    match = re.fullmatch(rf"{TEXT_COMMAND}\{{([^{{}}]*)\}}", text)
    return match[1].strip() if match else text


def verify(completion: str, answer: str) -> tuple[float, str, str]:
    """Return reward, status and detail of a completion. Fractions are those of the package.

    A full stop after the answer and markup around it (**5**, `5`, $5$) are ignored, if the answer without
    them scores more. An answer on which the verifier raises an exception is wrong, unless the verifier also
    raises on the reference answer.
    """
    row = read_row(answer)
    verifier_of(row)  # also without an answer, so that the row is the cause of an error
    text = stated_answer(completion)
    if not text:
        return 0.0, "no_answer", ""
    rewards = []
    for candidate in dict.fromkeys((text, text.removesuffix("."), without_markup(text))):
        with contextlib.suppress(Exception):  # of any type, because the text is the policy's
            rewards.append(score(row, candidate))
    if not rewards:
        score(row, reference_of(answer))
        return 0.0, "wrong", "the verifier raises on this answer"
    return max(rewards), "ok" if max(rewards) == 1 else "wrong", ""
