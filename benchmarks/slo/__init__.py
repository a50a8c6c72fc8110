"""SLOs kept on real engines: plain vLLM, a static placement, and PengServe with and without placing KV by them."""
