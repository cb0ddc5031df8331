"""Evaluation by lm-eval: `python -m mt_infer.eval --model mt --model_args folder=DIR ...`."""
