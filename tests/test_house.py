"""Rules for every Python file (imports, length of functions, docstrings) and for the Makefile."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT

from tests.mutants import MUTANTS
from tests.patience import limit

FLOORS = (  # a file imports from files on the same floor or below; imports have no circles
    ("experiments", "tests"),
    ("train_rl",),
    ("sampling",),
    ("lifecycle",),
    ("configure", "greso"),
    (
        "judges", "rollout", "vllm_worker", "memory_plan", "fp8", "moe_model", "plugins", "data", "runtime",
        "batch", "reward", "episodes", "extras", "settings", "verifiers", "workers",
    ),
    ("kernels",),
)  # fmt: skip
# runtime/ serves every run; of the method it imports only the types and the settings.
BELOW_RUNTIME = ("runtime", "batch", "settings")
FOLDERS = ("experiments", "tests", "data", "extras", "kernels", "runtime", "verifiers")
PYTHON = sorted([*ROOT.glob("*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))])
CAMPAIGN = [path for path in PYTHON if path.is_relative_to(ROOT / "tests" / "campaign")]
CODE = [path for path in PYTHON if "tests" not in path.relative_to(ROOT).parts] + CAMPAIGN
MAX_LINES = 60
MAX_LOOP = 55
MODULES = [path.stem for path in ROOT.glob("*.py")]
MODULES += [f"{path.parent.name}.{path.stem}" for name in FOLDERS[2:] for path in (ROOT / name).glob("*.py")]

each_file = pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
each_code_file = pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def unit_of(path: Path) -> str:
    """Return the top folder of a file, or the stem of a file at the root."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor_of(unit: str) -> int:
    return next(number for number, units in enumerate(FLOORS) if unit in units)


# ---- imports -----------------------------------------------------------------------------------------------


def imported_names(node: ast.AST, inside_functions: bool = True) -> list[str]:
    """List the dotted names that a piece of code imports; `from a import b` gives a.b."""
    names = []
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if is_function and not inside_functions:
            continue
        if isinstance(child, ast.Import):
            names += [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are absolute"
            names += [f"{child.module}.{alias.name}" for alias in child.names]
        names += imported_names(child, inside_functions)
    return names


def file_of(name: str, importer: Path) -> Path | None:
    """Return the file of the project that defines a dotted name; None for a name of a library."""
    words = name.split(".")
    for folder in (ROOT, importer.parent):  # pytest and scripts also find files in the importer's folder
        for length in range(len(words), 0, -1):
            path = folder.joinpath(*words[:length]).with_suffix(".py")
            if path.is_file():
                return path
    return None


def imported_files(path: Path) -> set[Path]:
    return {file_of(name, path) for name in imported_names(parse(path))} - {None, path}


@each_file
def test_a_file_imports_from_the_same_floor_or_below(path):
    unit = unit_of(path)
    files = imported_files(path)
    assert not [file.name for file in files if floor_of(unit_of(file)) < floor_of(unit)]
    assert unit != "runtime" or not [file.name for file in files if unit_of(file) not in BELOW_RUNTIME]


@each_code_file
def test_code_does_not_import_tests(path):
    assert path in CAMPAIGN or not [file for file in imported_files(path) if unit_of(file) == "tests"]


def circles(graph: dict[Path, set[Path]]) -> list[set[Path]]:
    """List the sets of files that import each other, by the transitive closure of the imports."""
    reached = {file: set(imports) for file, imports in graph.items()}
    for middle in graph:
        for file in graph:
            if middle in reached[file]:
                reached[file] |= reached[middle]
    sets = {frozenset(o for o in reached[file] if file in reached[o]) for file in graph}
    return [set(circle) for circle in sets if circle]


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and under TYPE_CHECKING count too, because they only hide a circle."""
    graph = {path: imported_files(path) for path in PYTHON}
    assert sum(map(len, graph.values())) > 100
    assert circles(graph) == []
    assert circles({1: {2}, 2: {3}, 3: {2}, 4: {1}}) == [{2, 3}]
    assert circles({1: {2, 3}, 2: {3}, 3: set()}) == []


@pytest.mark.parametrize("module", ["reward", "verifiers.tools"])
def test_a_worker_starts_without_slow_libraries(module):
    """Each worker process imports workers.py and the module of its tasks, and its start should be quick."""
    slow = "torch transformers numpy pydantic vllm deepspeed sympy math_verify tokenizers asyncio"
    code = f"import sys, workers, {module}; print(*set({slow.split()}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
loaded = set(sys.argv[1].split()) & set(sys.modules)
assert not loaded, loaded
"""
LIGHT = [
    "reward", "runtime.config", "runtime.launch", "runtime.summary",
    "data.prompts", "data.gsm8k", "data.tiny",
]  # fmt: skip


def assert_imports_are_silent(folder: Path, modules: list[str], forbidden: str) -> None:
    """Import modules in a fresh process, which may print nothing and may not load the forbidden modules."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORT_ALL, forbidden, *modules]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit(120)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(folder.iterdir()) == []


def test_importing_light_modules_is_silent_and_cheap(tmp_path):
    assert_imports_are_silent(tmp_path, LIGHT, "torch transformers datasets math_verify vllm")


@pytest.mark.slow
def test_importing_every_module_is_silent(tmp_path):
    assert set(LIGHT) < set(MODULES)
    assert_imports_are_silent(tmp_path, MODULES, "vllm datasets math_verify matplotlib experiments tests")


# ---- limits of time in tests -------------------------------------------------------------------------------
TESTS = [path for path in PYTHON if unit_of(path) == "tests" and path not in CAMPAIGN]
SCALED = ("preloaded.run", "torchrun", "two_agents", "train", "start", "launch")  # scale their timeout_s
FOREVER_S = 1000  # a longer sleep stands for a process that hangs


def is_fixed(node: ast.AST) -> bool:
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
    return is_number and 0 < node.value < FOREVER_S


def reads_clock(node: ast.AST) -> bool:
    return bool(re.search(r"time\.(monotonic|perf_counter|time)\(\)", ast.unparse(node)))


def fixed_limits(tree: ast.AST) -> list[int]:
    """List the lines on which a call waits for a fixed time, or a reading of a clock is bounded by one."""
    lines = []
    for node in ast.walk(tree):
        is_bad = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, *pair in zip(node.ops, sides, sides[1:]):
                small, large = pair if isinstance(op, (ast.Lt, ast.LtE)) else reversed(pair)
                is_bad |= reads_clock(small) and is_fixed(large)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = (node.left, node.right)
            is_bad = any(map(reads_clock, sides)) and any(map(is_fixed, sides))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            waits = node.args[:1] if name.endswith((".wait", ".join", ".communicate")) else []
            if name not in SCALED and not name.endswith("Settings"):
                limits = [k.value for k in node.keywords if k.arg in ("timeout", "timeout_s", "wall_s")]
                waits = waits + limits
            is_bad = any(map(is_fixed, waits))
        lines += [node.lineno] if is_bad else []
    return lines


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_limits_of_time_scale_with_the_speed_of_the_machine(path):
    """Wait for a condition, or use limit() of tests/patience.py: other processes may take the processor."""
    assert fixed_limits(parse(path)) == []


# ---- sizes and docstrings ----------------------------------------------------------------------------------


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def functions_of(path: Path) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(parse(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


@each_code_file
def test_no_function_is_long(path):
    long = [f"{node.name}: {lines_of(node)}" for node in functions_of(path) if lines_of(node) > MAX_LINES]
    assert not long, ", ".join(long)


def test_the_loop_of_a_run_fits_on_a_page():
    (main,) = [node for node in functions_of(ROOT / "train_rl.py") if node.name == "main"]
    (loop,) = [node for node in ast.walk(main) if isinstance(node, ast.While)]
    assert lines_of(loop) <= MAX_LOOP


def documented(tree: ast.Module) -> list[ast.AST]:
    """List the nodes that need a docstring: the module, public functions, classes and public methods.

    forward() and backward() are exempt: torch defines their role, and the class documents the computation.
    """
    nodes = [tree]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_":
            nodes.append(node)
            methods = node.body if isinstance(node, ast.ClassDef) else []
            nodes += [method for method in methods if isinstance(method, ast.FunctionDef)
                      and method.name[0] != "_" and method.name not in ("forward", "backward")]  # fmt: skip
    return nodes


@each_code_file
def test_public_code_has_docstrings(path):
    nodes = [node for node in documented(parse(path)) if not ast.get_docstring(node)]
    assert not [getattr(node, "name", "the module") for node in nodes]


@pytest.mark.parametrize("mutant", MUTANTS, ids=range(1, 1 + len(MUTANTS)))
def test_each_mutant_fits_the_present_code(mutant):
    """`python -m tests.mutants` puts these faults into the code; a changed text is mended in mutants.txt."""
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.text) == 1, (
        f"tests/mutants.txt: {mutant.file} lacks, or repeats, {mutant.text}"
    )
    ast.parse(source.replace(mutant.text, mutant.replacement))
    assert mutant.text != mutant.replacement and mutant.tests
    assert not [name for name in mutant.tests if not (ROOT / f"tests/test_{name}.py").is_file()]


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_the_commands_of_make_are_valid_shell(stack):
    targets = (
        "demo lint quick figures record test-ranks test-others test-sandbox check-first check-second"
    ).split()
    make = ["make", "--dry-run", "--always-make", f"STACK={stack}", "RANKS=2", *targets]
    commands = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=limit(30))
    assert commands.returncode == 0, commands.stderr
    assert f"/installed-{stack}" in commands.stdout
    checked = subprocess.run(
        ["sh", "-n"], input=commands.stdout, capture_output=True, text=True, timeout=limit(30)
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_two_stacks_never_share_a_folder(tmp_path):
    """The builds of vLLM for GPUs and for CPUs would overwrite each other's files."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    folders = []
    for installed in ("cpu", "gpu"):
        (tmp_path / ".venv").mkdir(exist_ok=True)
        (tmp_path / f".venv/installed-{installed}").touch()
        for stack in ("cpu", "gpu"):
            make = ["make", "-s", "--eval=show: ; @echo $(VENV)", f"STACK={stack}", "show"]
            folders.append(subprocess.run(make, cwd=tmp_path, capture_output=True, text=True).stdout.strip())
        (tmp_path / f".venv/installed-{installed}").unlink()
    assert folders == [".venv", ".venv-gpu", ".venv-cpu", ".venv"]


# ---- budgets: growth pays by deletion ----------------------------------------------------------------------
BUDGETS = {  # at most 3 % above what is there; a change that needs more deletes as much elsewhere
    "KB": 12400,
    "files": 575,
    "modules, the root": 17,
    "words of Markdown, docs": 24110,
    "words of Markdown, docs/silent_faults.md": 2915,
    "words of Markdown, experiments": 12950,
    "words of Markdown, kernels": 500,
    "words of Markdown, tests": 890,
    "words of Markdown, tests/campaign": 510,
    "words of Markdown, the root": 3850,
    "lines of Python, data": 4517,
    "lines of Python, examples": 75,
    "lines of Python, experiments": 8316,
    "lines of Python, extras": 1963,
    "lines of Python, kernels": 753,
    "lines of Python, runtime": 5069,
    "lines of Python, tests": 30069,
    "lines of Python, tests/campaign": 1838,
    "lines of Python, the root": 11510,
    "lines of Python, verifiers": 4053,
}


def tree() -> list[Path]:
    """List the files of the repository, with new files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def place_of(path: Path) -> str:
    """Return the folder whose budget a file counts for."""
    folders = path.relative_to(ROOT).parts[:-1]
    if path == ROOT / "docs" / "silent_faults.md":
        return "docs/silent_faults.md"
    return "tests/campaign" if folders[:2] == ("tests", "campaign") else (*folders, "the root")[0]


def sizes(files: list[Path]) -> Counter:
    """Count bytes, files, root modules, and by folder words of Markdown and lines of Python."""
    counts = Counter({"files": len(files), "KB": sum(path.stat().st_size for path in files) / 1000})
    for path in files:
        if path.suffix == ".md":
            counts[f"words of Markdown, {place_of(path)}"] += len(path.read_text().split())
        if path.suffix == ".py":
            counts[f"lines of Python, {place_of(path)}"] += len(path.read_text().splitlines())
            counts["modules, the root"] += path.parent == ROOT
    return counts


def test_the_tree_keeps_its_budgets():
    counts = sizes(tree())
    exceeded = {name: (count, BUDGETS.get(name)) for name, count in counts.items()
                if count > BUDGETS.get(name, 0)}  # fmt: skip
    assert not exceeded, "delete as much elsewhere, or argue for another budget in the commit"
    folders = [name for name in BUDGETS if name.startswith("lines of Python") and "tests" not in name]
    assert sum(BUDGETS[name] for name in folders) <= 36258
