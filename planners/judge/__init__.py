"""The judge: predicts what each change of the layout does to latency, and takes the best one that pays."""
