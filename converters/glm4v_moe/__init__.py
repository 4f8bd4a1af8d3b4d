"""GLM-4.5V (`glm4v_moe`): one module per `model_id` with its weight map and config map, and the family's converter."""
