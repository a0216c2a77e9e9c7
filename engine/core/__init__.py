"""The scheduler and its data: integers and the standard library only; no tensors, text or clocks."""
