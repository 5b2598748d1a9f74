"""Pure decisions and mathematics of AdLoCo: no files, no logging, no devices, no processes."""
