"""GLM-4.1V (`glm4v`): what differs from GLM-4.5V, and nothing else. Tower and projector are GLM-4.5V's."""
