-- +goose NO TRANSACTION
-- +goose Up
create index concurrently races_winner on races (winner);
-- +goose Down
drop index races_winner;
