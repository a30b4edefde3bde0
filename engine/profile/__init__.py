"""What this machine can do, measured: disk, projections, layers, attention. Kept between starts."""
