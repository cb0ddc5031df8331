"""AdamW over fp32 masters, layout-independent gradient norms, learning-rate schedules."""

__all__: list[str] = []
