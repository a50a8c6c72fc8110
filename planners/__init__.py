"""Pure planners: `(snapshot, config) -> plan | None`. No torch, ray, vllm, clock or I/O lives on this floor."""
