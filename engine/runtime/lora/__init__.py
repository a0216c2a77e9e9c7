"""LoRA adapters: reading PEFT folders, and the matrices in memory."""
