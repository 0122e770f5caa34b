"""Rules about the repository: what an import loads, which names exist, who may import and call what."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import upipe

PACKAGE = Path(upipe.__file__).parent
OPTIONAL = {"transformers", "accelerate", "peft", "trl", "deepspeed", "hydra", "flash_attn", "flash_attn_interface"}
OPTIONAL |= {"liger_kernel", "triton_kernels", "matplotlib", "datasets", "experiments"}

# The fixed names of the design. A name that comes to exist leaves NOT_YET.
FIXED_NAMES = {
    "AttentionMask",
    "HeadSchedule",
    "HeadwiseBlock",
    "Projections",
    "Rotary",
    "Stage",
    "UPipeAttention",
    "UlyssesAttention",
    "context_parallel_loss",
    "fused_linear_cross_entropy",
    "headwise_attention",
    "memory",
    "ring_attention",
    "shard_batch",
    "tiled_mlp",
    "ulysses_attention",
}
NOT_YET = {"fused_linear_cross_entropy", "ring_attention"}


def source_files() -> list[Path]:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 15
    return files


def here(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported_modules(source: str) -> set[str]:
    """Absolute names of imported modules, and of what is imported from them: ``from a import b`` is a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports(source: str, module: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in imported_modules(source))


def distributed_calls(source: str) -> list[str]:
    """Calls of functions of torch.distributed, by any name they were imported under. Types may be named."""
    tree = ast.parse(source)
    modules, functions = {"torch.distributed"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            modules |= {a.asname or a.name for a in node.names if a.name == "distributed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            functions |= {a.asname or a.name for a in node.names if a.name[0].islower() or a.name[0] == "_"}
    prefixes = tuple(f"{name}." for name in modules | functions)
    called = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [name for name in called if name in functions or name.startswith(prefixes)]


# What an import loads


def test_import_loads_no_optional_library():
    code = (
        "import json, sys, upipe, torch; "
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), torch.cuda.is_initialized(), "
        "torch.distributed.is_initialized()]))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    loaded, cuda, distributed = json.loads(result.stdout)
    assert {"torch", "upipe"} <= set(loaded)
    assert not OPTIONAL & set(loaded)
    assert (cuda, distributed) == (False, False)
    assert result.stderr == ""


# Names


def test_exported_names_are_the_fixed_ones():
    assert set(upipe.__all__) == FIXED_NAMES - NOT_YET
    assert len(upipe.__all__) == len(set(upipe.__all__))


@pytest.mark.parametrize("name", sorted(FIXED_NAMES - NOT_YET))
def test_exported_name_exists_and_is_documented(name):
    assert getattr(upipe, name).__doc__


@pytest.mark.parametrize("name", sorted(NOT_YET))
def test_name_that_exists_is_exported(name):
    assert not hasattr(upipe, name), f"{name} exists: take it out of NOT_YET"


def test_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


# Import borders


@pytest.mark.parametrize("path", source_files(), ids=here)
def test_the_library_does_not_import_the_experiments(path):
    assert not imports(path.read_text(), "experiments")


SCHEMES = ("ulysses", "headwise", "ring")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_do_not_import_each_other(scheme):
    path = PACKAGE / f"{scheme}.py"
    if not path.exists():
        assert f"{scheme}_attention" in NOT_YET
        return
    source = path.read_text()
    assert imports(source, "upipe.schedule" if scheme != "ring" else "upipe.mask")
    for other in {*SCHEMES, "nn"} - {scheme}:
        assert not imports(source, f"upipe.{other}")


def test_the_specification_imports_nothing_of_ours():
    source = (PACKAGE / "reference.py").read_text()
    assert imports(source, "torch")
    assert not imports(source, "upipe")


# Files that may call torch.distributed: the exchanges, and those that make groups.
MAY_CALL = {"collectives.py", "testing.py", "memory/fake.py"}


@pytest.mark.parametrize("path", [path for path in source_files() if here(path) not in MAY_CALL], ids=here)
def test_only_the_exchanges_call_torch_distributed(path):
    assert distributed_calls(path.read_text()) == []


# The checks themselves


def test_the_exchanges_are_seen_to_call():
    calls = distributed_calls((PACKAGE / "collectives.py").read_text())
    assert {"dist.all_to_all_single", "dist.all_reduce", "dist.get_rank"} <= set(calls)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.barrier()",
        "import torch\ntorch.distributed.all_reduce(x)",
        "from torch import distributed as d\nif d.is_initialized(): pass",
        "from torch.distributed import all_gather as gather\ngather(x, y)",
        "import torch.distributed as dist\nwork = [dist.nn.functional.all_to_all(x) for x in y]",
        "from torch.distributed import _functional_collectives as funcol\nfuncol.all_reduce(x)",
        "import torch.distributed._functional_collectives as funcol\nfuncol.all_reduce(x)",
    ],
)
def test_a_call_is_found(source):
    assert len(distributed_calls(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndef f(group: dist.ProcessGroup | None) -> dist.ProcessGroup: ...",
        "from torch.distributed.tensor import DTensor\nisinstance(x, DTensor)",
        "from upipe.collectives import group_size\ngroup_size(group)",
    ],
)
def test_a_type_is_no_call(source):
    assert distributed_calls(source) == []


IMPORTS = ("import pkg.b", "import pkg", "from pkg import b", "from pkg.b import c", "def f():\n    import pkg.b as c")


@pytest.mark.parametrize("source", IMPORTS)
def test_an_import_is_found(source):
    assert imports(source, "pkg")
    assert not imports(source, "b")
    assert not imports(source.replace("pkg", "pkgs"), "pkg")
