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


def test_the_import_takes_no_longer_than_a_few_of_the_standard_library():
    code = (
        "import time\n"
        "start = time.perf_counter(); import json, decimal, argparse, email.message, http.client\n"
        "middle = time.perf_counter(); import pagedkv\n"
        "print((time.perf_counter() - middle) / (middle - start))"
    )
    assert min(float(run(code)) for _ in range(3)) < 1


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
