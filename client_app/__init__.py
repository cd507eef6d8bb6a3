"""The site: receives an instruction, works on data that never leaves, answers with an update."""
