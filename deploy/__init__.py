"""Files to start PengServe with; `pengserve init DIR` copies them out of an installed package."""
