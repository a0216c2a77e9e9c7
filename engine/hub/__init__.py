"""The Hugging Face hub: the files of a model there, and the cache that keeps them.

huggingface_hub has the addresses, the token, the session and the layout of the cache, so HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE and HF_HUB_CACHE mean here what they mean elsewhere. Downloads are the library's too; what it does
not check is checked in engine/hub/transfer.py. Runs at start-up; imports no torch.
"""

import os

# Read when huggingface_hub is imported. Its telemetry asks the hub for a list of programs before the first request, which
# would double the wait for a hub that hangs.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
