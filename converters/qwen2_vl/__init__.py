"""Qwen2-VL (`qwen2_vl`): one module per part with its section of model.json, weight map and config map, and the family's converter."""
