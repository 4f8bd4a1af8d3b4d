"""The one YAML of an FSDP2 run: six sections, closed and strict. Refused here is what the file alone shows to be wrong; what
depends on the model, the number of processes or the platform is judged in `mm_models.fsdp2.validation`.
"""

from mm_models.config.fsdp2.run import RunConfig, load_config, resolved

__all__ = ["RunConfig", "load_config", "resolved"]
