drop index races_winner;
