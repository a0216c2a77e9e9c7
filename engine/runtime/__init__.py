"""Everything that uses torch: models, kernels, sampling and K/V memory. runner.py runs a StepPlan."""
