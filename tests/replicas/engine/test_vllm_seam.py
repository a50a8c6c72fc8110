"""Every vLLM name that replicas stand on exists. A failure here names what an upgrade moved."""

import pytest

pytest.importorskip("vllm")
from pengserve.replicas.engine import vllm_seam

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", vllm_seam.__all__)
def test_name_exists(name: str) -> None:
    assert hasattr(vllm_seam, name), f"vLLM moved {name}; update replicas/engine/vllm_seam.py"


@pytest.mark.parametrize(
    ("owner", "attribute"), [(owner, name) for owner, names in vllm_seam.ATTRIBUTES.items() for name in names]
)
def test_attribute_exists(owner: type, attribute: str) -> None:
    assert hasattr(owner, attribute), f"vLLM renamed {owner.__name__}.{attribute}; see replicas/engine/vllm_seam.py"


def test_vllm_is_the_pinned_one() -> None:
    import vllm

    assert vllm.__version__.startswith("0.32."), f"written for vLLM 0.32, found {vllm.__version__}"
