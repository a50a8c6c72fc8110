"""What is compared: PengServe and the baselines, one small file each."""
