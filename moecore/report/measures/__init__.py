"""What the report shows of each measurement or stage: a file each, which ends with SHOWN."""
