"""Imports go one way, and each heavy library has its place. Read from the source, so nothing is imported for it."""

from __future__ import annotations

import ast
import configparser
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "checkmate_tf"
FILES = sorted(PACKAGE.rglob("*.py"))

EVERYWHERE = {"_cpu_memory", "_documents", "_files", "_text", "_version", "budget", "errors"}
"""Modules without a place in the order: anyone may import them, and they import only one another."""

LIBRARY = {
    "baselines",
    "core",
    "device_memory",
    "keras",
    "lowering",
    "planning",
    "plots",
    "progress",
    "reports",
    "solvers",
    "step",
    "studies",
}

MAY_IMPORT = {
    **dict.fromkeys(EVERYWHERE, frozenset()),
    "_tf_internals": set(),
    "core": {"core"},
    "solvers": {"baselines", "core", "solvers"},
    "baselines": {"baselines", "core"},
    "planning": {"core", "planning", "solvers"},
    "device_memory": {"_tf_internals", "core", "device_memory"},
    "lowering": {"_tf_internals", "core", "device_memory", "lowering"},
    "step": {"core", "device_memory", "lowering", "planning", "reports", "step"},
    "studies": {"core", "planning", "reports", "studies"},
    "keras": {"_tf_internals", "core", "device_memory", "keras", "lowering", "planning", "reports", "step", "studies"},
    "plots": {"plots"},
    "reports": {"planning", "plots", "reports"},
    "progress": set(),
    "api": {"api", *LIBRARY},
    "": {"api", *LIBRARY},
    "sample_data": set(),
    "commands": {"", "commands", "core", "plots", "sample_data", "solvers"},
    "cli": {"cli", "commands"},
    "__main__": {"cli"},
}
"""Part of the package -> the parts that it may import beside EVERYWHERE; "" is the package's own __init__."""

PLACES = {
    "tensorflow": {"_tf_internals", "device_memory", "lowering", "step", "keras", "api", "commands"},
    "keras": {"_tf_internals", "lowering", "step", "keras", "api", "commands"},
    "ortools": {"solvers"},
    "matplotlib": {"plots"},
    "networkx": {"baselines", "lowering"},
    "sklearn": {"sample_data"},
    "PIL": {"sample_data"},
}
"""Library -> the only parts that may import it."""

TYPES_ONLY = {("reports", "matplotlib")}
"""What a part may name in annotations (under TYPE_CHECKING) although it must not import it."""

INTERNALS = PACKAGE / "_tf_internals.py"
"""The only file that may name what TensorFlow and Keras do not make public."""

DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "google": "protobuf", "pybind11_abseil": "ortools"}


def part_of(path: Path) -> str:
    """The first name below the package: "core" for core/graph.py, "api" for api.py, "" for __init__.py."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    return "" if relative.parts == ("__init__",) else relative.parts[0]


def imports_of(source: str, *, types: bool = True) -> set[str]:
    """Absolute names of all that a file imports, wherever in the file it does; relative imports are refused."""
    found = set()
    for node in walk(ast.parse(source), types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"line {node.lineno}: imports must be absolute")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def walk(node: ast.AST, types: bool):
    yield node
    for child in ast.iter_child_nodes(node):
        if types or not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from walk(child, types)


def parts_imported(imports: set[str]) -> set[str]:
    """The parts of the package among these imports; the package itself is ""."""
    names = [name.split(".") for name in imports]
    known = {part_of(path) for path in FILES}
    return {n[1] if n[1] in known else "" for n in names if n[0] == "checkmate_tf" and len(n) > 1} | {
        "" for n in names if n == ["checkmate_tf"]
    }


def modules_imported_by(path: Path) -> set[Path]:
    """The files of the package that a file imports, wherever in it, for types too."""
    found = set()
    for name in imports_of(path.read_text(encoding="utf-8")):
        place = ROOT.joinpath(*name.split("."))
        above = place.parent
        candidates = (place.with_suffix(".py"), place / "__init__.py", above.with_suffix(".py"), above / "__init__.py")
        found |= set([candidate for candidate in candidates if candidate in FILES][:1])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} has no place in the order of imports: add it to MAY_IMPORT"
    imported = parts_imported(imports_of(path.read_text(encoding="utf-8")))
    wrong = imported - MAY_IMPORT[part] - EVERYWHERE
    assert not wrong, f"{part} must not import {sorted(wrong)}"


def test_no_part_imports_itself_through_others():
    graphlib.TopologicalSorter({part: others - {part} for part, others in MAY_IMPORT.items()}).prepare()


def test_no_module_imports_itself_through_others():
    order = graphlib.TopologicalSorter({path: modules_imported_by(path) - {path} for path in FILES})
    order.prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_library_has_its_place(path):
    source, part = path.read_text(encoding="utf-8"), part_of(path)
    imported = {name.split(".")[0] for name in imports_of(source, types=False)}
    named = {name.split(".")[0] for name in imports_of(source)} - imported
    wrong = {library for library in imported if part not in PLACES.get(library, {part})}
    wrong |= {
        library for library in named if part not in PLACES.get(library, {part}) and (part, library) not in TYPES_ONLY
    }
    assert not wrong, f"{part} must not import {sorted(wrong)}"


def is_public(name: str) -> bool:
    """Whether an import may stay in the file that needs it: `tensorflow`, its formats, Keras without insides."""
    library, *rest = name.split(".")
    if library == "tensorflow":
        return rest[:1] in ([], ["core"])
    return library != "keras" or not any(part == "src" or part.startswith("_") for part in rest)


def private_attributes(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names with an underscore in front that a file looks up on anything, and all names that it defines."""
    used, defined = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                used.add(name)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                used.add(name)
            case ast.Attribute(attr=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
    used = {name for name in used if name.startswith("_") and not re.fullmatch(r"__(?!internal)\w+__", name)}
    return used, defined


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_not_public_has_one_place(path):
    imported = set() if path == INTERNALS else imports_of(path.read_text(encoding="utf-8"))
    wrong = {name for name in imported if not is_public(name)}
    assert not wrong, f"only _tf_internals may import {sorted(wrong)}"


def test_private_attributes_are_the_packages_own():
    found = [private_attributes(ast.parse(path.read_text(encoding="utf-8"))) for path in FILES if path != INTERNALS]
    used, defined = (set().union(*names) for names in zip(*found, strict=True))
    wrong = used - defined - {"_SubParsersAction"}  # argparse's, for annotations
    assert not wrong, f"only _tf_internals may use {sorted(wrong)}"


def test_every_library_is_required_by_the_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["examples"]
    required = {re.match(r"[\w-]+", line)[0] for line in lines.split() if line[0].isalpha()}
    libraries = set()
    for path in FILES:
        libraries |= {name.split(".")[0] for name in imports_of(path.read_text(encoding="utf-8"))}
    libraries -= set(sys.stdlib_module_names) | {"checkmate_tf"}
    missing = {DISTRIBUTIONS.get(library, library) for library in libraries} - required
    assert not missing, f"setup.cfg must require {sorted(missing)}"


def test_importing_the_package_loads_no_heavy_library():
    code = "import sys, checkmate_tf; print(*sorted({'matplotlib', 'ortools', 'tensorflow'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


def test_planning_loads_or_tools_in_no_process_that_holds_tensorflow():
    """Imported before TensorFlow, OR-Tools lets it fail (`solvers.engines`): only the solver's own process loads it."""
    code = "import sys, checkmate_tf.step.pipeline, checkmate_tf.solvers.remote; print('ortools' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False"]


def test_the_checks_see_what_they_must():
    source = """
if TYPE_CHECKING:
    import a.b
def f():
    from checkmate_tf.core import graph
    from checkmate_tf import api, x
"""
    real = {"checkmate_tf.core.graph", "checkmate_tf.api", "checkmate_tf.x"}
    assert imports_of(source) == {"a.b", *real}
    assert imports_of(source, types=False) == real
    assert parts_imported({"checkmate_tf.core.graph", "checkmate_tf.nothing", "numpy"}) == {"core", ""}
    assert parts_imported({"checkmate_tf"}) == {""}
    assert PACKAGE / "errors.py" in modules_imported_by(PACKAGE / "budget.py")
    assert PACKAGE / "plots" / "memory.py" in modules_imported_by(PACKAGE / "reports" / "report.py")  # in a function
    assert PACKAGE / "solvers" / "__init__.py" in modules_imported_by(PACKAGE / "commands" / "solve.py")
    assert part_of(PACKAGE / "core" / "graph.py") == "core"
    public = ("tensorflow", "tensorflow.core.framework.graph_pb2", "keras", "keras.layers", "numpy._core")
    assert all(is_public(name) for name in public)
    inside = ("tensorflow.python.eager.context", "tensorflow.__internal__", "tensorflow.tsl.x", "keras.src.Model")
    assert not any(is_public(name) for name in inside)
    tree = ast.parse("tf.__internal__.x; model._one; getattr(model, '_two', None); model.__dict__; model._three = 4")
    assert private_attributes(tree) == ({"__internal__", "_one", "_two"}, {"_three"})
    with pytest.raises(AssertionError, match="absolute"):
        imports_of("from . import x")
