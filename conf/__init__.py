"""Configuration that ships with the package: Hydra's files, models of the zoo, GPUs."""
