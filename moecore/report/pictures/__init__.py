"""What no column and no generic chart shows of a measurement: ``PICTURES`` of each file."""
