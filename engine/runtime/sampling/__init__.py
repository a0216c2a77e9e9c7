"""Turns logits into token ids. sampler.py applies the steps in order."""
