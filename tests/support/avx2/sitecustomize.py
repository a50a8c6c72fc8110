"""Makes every process believe that the machine has AVX2 and nothing newer: `make test AVX2=1`.

Python imports this module at start when its folder is on PYTHONPATH, in children too. torch's and oneDNN's kernels obey
the variables; vLLM chooses its kernels by what `torch.cpu` says of the machine.
"""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")  # read on Intel machines

MASKED = (
    "_is_avx512_supported",
    "_is_avx512_bf16_supported",
    "_is_vnni_supported",
    "_is_amx_tile_supported",
    "_is_amx_fp16_supported",
)


class TorchCpuMask:
    """Finds `torch.cpu` as Python does, and replaces its answers once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of `torch.cpu`; None for all other modules."""
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_masked(module: ModuleType) -> None:
            execute(module)
            for answer in MASKED:
                if not hasattr(module, answer):
                    raise ImportError(f"torch.cpu.{answer} is gone: the AVX2 mask must be mended")
                setattr(module, answer, lambda: False)

        spec.loader.exec_module = execute_masked  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, TorchCpuMask())  # type: ignore[arg-type]
