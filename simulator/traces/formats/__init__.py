"""One small file per format of public traces. `loading.FORMATS` lists them."""
