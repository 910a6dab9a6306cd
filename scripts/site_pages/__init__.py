"""The parts of the documentation's site that are generated: see mkdocs.yml."""
