"""The sources that travel inside the extension are those of this checkout."""

from host_device import checkout_sources
from pagedkv import _core


def test_the_extension_holds_the_sources():
    assert _core.cuda_sources() == checkout_sources(), "build the extension again"
