"""Where weights come from: safetensors folders, GGUF files, the hub, block-wise FP8."""
