"""Qwen2.5-VL (`qwen2_5_vl`): what differs from Qwen2-VL, and nothing else."""
