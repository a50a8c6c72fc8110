"""What PengServe costs against vLLM's own server and against ray.serve.llm, in one run: `make bench-overhead`."""
