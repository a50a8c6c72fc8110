"""The environment an instance's process must start with. Values only: nothing is read or set here."""

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.units import GIB, MIB


def process_environment(config: InstanceConfig) -> dict[str, str]:
    """Variables to put into an instance's process before Python starts.

    OpenMP, vLLM and the C library read these once; setting them later has no effect.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the instance's own process hosts the engine
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
    if not config.is_stock:
        # Groups' lanes, and memory that changes hands, are built on the V1 runner. Elsewhere vLLM chooses.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if config.device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(config.cpu_threads),
            # vLLM would pin threads to cores; instances that share cores must float.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # glibc would give the memory of a long prompt's activations back after each step, and the next one pay for
            # every page of it again: 13 % of a step of 1,700 tokens. 32 MiB is the most that it takes for the first.
            "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
            "MALLOC_TRIM_THRESHOLD_": str(2 * GIB),
        }
    return environment
