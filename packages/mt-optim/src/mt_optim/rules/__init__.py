"""Update rules: the arithmetic of one optimizer's step."""
