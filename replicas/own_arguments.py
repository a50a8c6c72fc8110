"""Engine arguments that PengServe sets itself: beside `engine/`, so that they are known without importing vLLM."""

OWN_ARGUMENTS = ("model", "worker_cls", "data_parallel_size")
