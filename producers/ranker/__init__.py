"""The ranker: learns from prompts and from the lengths of their answers how long new answers will be."""
