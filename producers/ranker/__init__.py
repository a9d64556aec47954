"""How long answers will be: learned from the prompts and from what came of them."""
