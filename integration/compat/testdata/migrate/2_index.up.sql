create index races_winner on races (winner);
