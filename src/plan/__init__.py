"""Methods compared, the largest micro batch, the recommendation; needs an estimator, not which one."""
