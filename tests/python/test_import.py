"""`import pagedkv` costs little and shows the whole public interface."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagedkv

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "aiohttp", "pydantic", "tqdm")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_nothing_heavy_is_imported():
    loaded = run(f"import sys, pagedkv; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_config_and_parameters_need_no_torch():
    code = (
        "import sys\n"
        "from pagedkv import EngineConfig, RequestOutput, SamplingParams\n"
        "EngineConfig(block_size=32), SamplingParams(temperature=0)\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_the_import_loads_one_module_of_the_package():
    code = "import sys, pagedkv; print(sorted(name for name in sys.modules if name.startswith('pagedkv')))"
    assert run(code).strip() == "['pagedkv']"


@pytest.mark.parametrize(
    ("given", "spin_count"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_idle_openmp_threads_do_not_spin_for_good(given, spin_count):
    code = (
        "import os\n"
        "for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'): os.environ.pop(name, None)\n"
        f"os.environ.update({given})\n"
        "import pagedkv; print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert run(code).strip() == spin_count


def test_a_model_is_built_without_torchs_compiler_or_what_reads_other_files(checkpoint):
    code = (
        "import sys; from pagedkv import LLM\n"
        f"LLM(**{checkpoint.options!r})\n"
        "unwanted = 'torch._dynamo', 'torch._inductor', 'sympy', 'gguf'\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    assert run(code).strip() == "[]"


def test_the_callers_side_needs_no_torch():
    loaded = run("import sys, pagedkv.front; print({'torch', 'transformers'} & set(sys.modules))")
    assert loaded.strip() == "set()"


def test_the_batch_needs_no_operations():
    assert run("import sys, pagedkv.batch; print('pagedkv.ops' in sys.modules)").strip() == "False"


@pytest.mark.parametrize("name", [name for name in pagedkv.__all__ if name != "__version__"])
def test_every_public_name_can_be_used(name):
    value = getattr(pagedkv, name)
    assert isinstance(value, type)
    assert value.__name__ == name
    assert name in dir(pagedkv)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pagedkv' has no attribute 'Llm'"):
        _ = pagedkv.Llm


def test_the_version_is_the_packages():
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert pagedkv.__version__ == pyproject["project"]["version"]
