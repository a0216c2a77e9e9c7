"""Models, kernels, sampling and K/V memory, in torch. runner.py runs a StepPlan."""
